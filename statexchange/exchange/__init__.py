"""Live trips of state between ranks and files: the only room that knows both."""
