"""`z2a serve`: a model behind an OpenAI-compatible endpoint, and a page to talk to it.

    server.py    listening, the routes, and the end
    model.py     the model that is served: loading, ready, draining
    wire.py      request bodies -> what is asked of the engine; fields and bounds, every problem in words; refusals
    answers.py   what the engine writes for a request -> OpenAI's objects and chunks
    metrics.py   counts for Prometheus
    web/         the page

The engine knows nothing of HTTP (infer/service.py), and nothing here knows tensors.
"""
