"""LTX-2 2.0: its sizes and its modules, named as in the official checkpoint."""
