"""`quire bench speculation`: tokens per second with and without speculation, turn about in one run.

`texts` fetches code and prose, `tasks` makes the classes of work from them, `run` measures, `report` draws the page.
"""
