"""Tables of several runs, made by one command each; nothing of vgen imports this."""
