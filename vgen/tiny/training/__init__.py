"""Trains the tiny LTX-2, stage by stage; needs diffusers (``pip install 'vgen[train]'``)."""
