"""`z2a serve`: a model behind an OpenAI-compatible endpoint, and a page to talk to it.

    wire.py         request bodies -> what is asked of the engine; every problem in words
    generations.py  what the engine writes for one request: from its thread into the event loop
    answers.py      what was written -> OpenAI's objects and events
    model.py        the model that is served: loading, ready, draining
    app.py          the routes
    server.py       listening, and the end

The engine knows nothing of HTTP (infer/service.py), and nothing here knows tensors.
"""
