"""An OpenAI-compatible server around engines; `app.make_app` makes it, `server.run` runs it."""
