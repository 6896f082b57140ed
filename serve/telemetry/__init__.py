"""The log, and OpenTelemetry's traces."""
