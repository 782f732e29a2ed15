"""A model behind HTTP: `server.app.create_app` makes the application, `server.run.serve` runs it.

app.py         the application: its endpoints, wired together
schemas.py     what is asked and what is answered; a request is checked here
negotiate.py   the Accept header: which of JSON, PNG and zip
responses.py   images as JSON, one PNG or a zip
worker.py      the one thread that owns the model
metrics.py     numbers for Prometheus
settings.py    what the server is told: flags, environment, settings file, defaults
entries.py     what stands in the lists of the settings
auth.py        who asks: tokens
limits.py      bounds on a request's body
refusals.py    an answer before the body was read
logs.py        a line for each request
headers.py     headers that every answer has
failures.py    what fails inside: a plain answer, a trace in the log
run.py         the process: port, signals, shutdown
static/        the page at `/` and the one at `/docs`; plain files, nothing loaded from elsewhere
"""
