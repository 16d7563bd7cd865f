"""What the agent asks: a model in this process (`local`) or a server with OpenAI's API (`remote`), as one protocol."""
