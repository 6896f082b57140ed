"""An OpenAI-compatible server around engines: `app.make_app` builds the application, `server.run` runs it."""
