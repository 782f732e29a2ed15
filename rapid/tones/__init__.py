"""Tones: how bright the pixels of private images are, in one noisy release; generated images are given the same ones.

A decoder that was trained by squared error draws soft edges, and a denoiser softens them further: too many pixels are
grey, and too few black or white. Private noise leaves grain on what should be even. How sharp and clean the private
images are, public ones cannot tell. So the mean histogram of pixels is released, by channel, and a curve maps the
levels of generated images onto it.

curve.py    the curve, a component of the bundle
release.py  the release
shares.py   shares of bins, and how noise is taken out of them
fit.py      the curve for what a model draws
"""
