"""Limits on what clients may send; docs/reference/http.md has the same table."""

BODY_BYTES = 8 << 20  # bytes of a request's body
SMALL_BODY_BYTES = 64 << 10  # bytes of a body that has room whatever the others have
BODIES_BYTES = 128 << 20  # bytes of all larger bodies at once
BODY_SECONDS = 30.0  # seconds until the whole body must have arrived
HEADER_BYTES = 64 << 10  # bytes of the request line and all headers
HEADER_SECONDS = 10.0  # seconds until they must have arrived, from when a client connects or begins another request
CONNECTIONS = 1024  # requests under way at once, more are answered with 503; beyond it idle connections are closed
OPEN_FILES = 1 << 16  # to which the process raises its own limit, if it may
FIRST_EVENT_SECONDS = 1.0  # seconds that a stream's headers wait for its first event, so that a fault has a status
PING_SECONDS = 15.0  # seconds between two comments in a stream that waits for its first event
SEND_SECONDS = 30.0  # seconds until a client must have taken what it was sent; otherwise it is cut off
KEEP_ALIVE_SECONDS = 5  # seconds that an idle connection stays open
PROMPTS = 64  # prompts of a completion
SAMPLES = 128  # `n`: samples per prompt
MESSAGES = 4096  # messages of a chat
LABEL_CHARACTERS = 256  # characters of a model's name, `user`, `session`, `cache_salt`
REQUEST_ID_CHARACTERS = 128
ECHOED_LOGITS = 1 << 28  # bytes (prompt tokens × vocabulary × 4) if both `echo` and `logprobs` are requested
CONVERSATION_BYTES = 16 << 20  # bytes of all stored responses that a response goes on from
TOKENS = 1 << 20  # ids of a prompt or of /detokenize; the model's own limit is checked later
BIASES = 1024  # tokens of `logit_bias`
METADATA = 16  # members of `metadata`
TOOLS = 128  # tools of a chat, and calls in a message
