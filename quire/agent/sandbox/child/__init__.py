"""What runs inside a sandboxed process, with the standard library only.

Started as `python -I -S -c …` by `quire.agent.sandbox.run`. Nothing here imports anything else of Quire.
"""
