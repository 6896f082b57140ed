"""Every bound on what clients may send; docs/guides/serving.md has the same table."""

BODY_BYTES = 8 << 20  # of a request
BODY_SECONDS = 30.0  # until the whole body is here
HEADER_BYTES = 64 << 10  # of the request line and all headers
HEADER_SECONDS = 10.0  # until they are here, from when a client connects or begins another request
CONNECTIONS = 1024  # open at once; what comes beyond is told 503
SEND_SECONDS = 30.0  # until a client has taken what it was sent, else it is cut off
KEEP_ALIVE_SECONDS = 5  # that an idle connection stays open
PROMPTS = 64  # of a completion
SAMPLES = 128  # n times the prompts
MESSAGES = 4096  # of a chat
LABEL_CHARACTERS = 256  # of a model's name, `user`, `session`, `cache_salt`
REQUEST_ID_CHARACTERS = 128
ECHOED_LOGITS = 1 << 28  # bytes: prompt tokens times vocabulary times 4, where `echo` and `logprobs` are both asked
TOKENS = 1 << 20  # ids of a prompt or of /detokenize, before they are held against the model
TOOLS = 128  # of a chat, and calls in a message
