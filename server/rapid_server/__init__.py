"""A model behind HTTP: `rapid_server.app.create_app` makes the application, `rapid_server.run.serve` runs it.

run.py                 the process: port, signals, shutdown
settings.py            server settings: flags, environment, settings file, defaults
setting_types.py       parsing and checking of the entries of list settings
app.py                 the application: endpoints and middleware, wired together
generation.py          `POST /generate`
prediction.py          `POST /predict`
openai_api.py          the endpoints under `/v1`, in the form of the OpenAI API
schemas.py             request and response bodies, and the validation of requests
negotiate.py           the Accept header: JSON, PNG, zip, JSON lines, server-sent events
responses.py           images in each of these formats, collected or streamed
models.py              the models by name, and their descriptions
encoder.py             PNGs on all cores, off the event loop
engine.py              the thread that owns the models, and the queue of requests
predictor.py           the thread that owns the classifiers, and the requests that wait for it
fair_queue.py          a queue in which clients take turns
job.py                 a request in the engine, and the way of its images to those who wait
worker.py              one model: requests in, steps, images out
device.py              whether a device still computes
scheduler.py           which requests take part in the next step
connections.py         timeouts and limits of HTTP connections
auth.py                bearer tokens
hosts.py               the names by which a server without tokens may be asked
limits.py              maximum sizes of a request's head and body
rejection.py           responses that are sent before the body was read
headers.py             security headers, and answers to HEAD
problems.py            the body of an error, in two forms
exception_handlers.py  a plain response for each exception; tracebacks go to the log
logs.py                log format, and one line per request
metrics.py             Prometheus metrics
static/                the pages at `/` and `/docs`; plain files, nothing is loaded from other origins
"""
