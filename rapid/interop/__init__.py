"""A bundle as an object of other libraries.

pipeline.py   a pipeline of diffusers
endless.py    a dataset of PyTorch that never ends
"""
