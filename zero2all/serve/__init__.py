"""`z2a serve`: a model behind an OpenAI-compatible endpoint, and a page to talk to it.

    server.py       listening, and the end
    app.py          the routes
    model.py        the model that is served: loading, ready, draining
    fields.py       the fields of request bodies: types, bounds, every problem in words
    wire.py         request bodies -> what is asked of the engine
    generations.py  what the engine writes for one request: from its thread into the event loop
    answers.py      what was written -> OpenAI's objects and chunks
    errors.py       refusals: a status and OpenAI's error body
    web/            the page

The engine knows nothing of HTTP (infer/service.py), and nothing here knows tensors.
"""
