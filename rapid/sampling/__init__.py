"""Sampling, independent of the method: what the command line and the server know of a model that makes images.

generator.py            the protocols Sampler, Generator and Trajectories
generate.py             `generate`: from arguments to images; checks of requests and labels
request.py              the state of a request: candidates to draw, in flight, pending, accepted
acceptance.py           acceptance of candidates by the probe
streams.py              noise streams by seed and number
linear_trajectories.py  Trajectories of linear samplers, rows at different calls in one batch
without_probe.py        what samplers without probe and knowledge base have in common
one_call.py             Trajectories of models with one network call per image
classifier.py           the protocol of classifiers
"""
