"""Sessions of the agent as load: `trace` reads one, `coding_session` is built in, `run` replays it, `tables` prints."""
