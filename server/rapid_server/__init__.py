"""A model behind HTTP: `server.app.create_app` makes the application, `server.run.serve` runs it.

run.py         the process: port, signals, shutdown
settings.py    what the server is told: flags, environment, settings file, defaults
entries.py     what stands in the lists of the settings
app.py         the application: its endpoints, wired together
generation.py  the endpoints that make images
schemas.py     what is asked and what is answered; a request is checked here
negotiate.py   the Accept header: JSON, PNG, zip, JSON lines, server-sent events
responses.py   images in each of these forms, collected or streamed
catalogue.py   the models by their names, and what is said of them
engine.py      the one thread that owns the models; requests wait here
line.py        one model at work: orders in, steps, images out
schedule.py    whose images take the next step
connections.py whoever opens a connection must ask something, and take the answer
auth.py        who asks: tokens
limits.py      bounds on a request's head and body
refusals.py    an answer before the body was read
headers.py     headers that every answer has
failures.py    what goes wrong: a plain answer, a trace in the log
logs.py        a line for each request
metrics.py     numbers for Prometheus
static/        the page at `/` and the one at `/docs`; plain files, nothing loaded from elsewhere
"""
