"""The public names of the runtime, each imported from the module that defines it, for type checkers."""

from .bundle.bundle import Bundle as Bundle
from .bundle.manifest import Manifest as Manifest
from .engine.async_engine import AsyncEngine as AsyncEngine
from .engine.engine import Engine as Engine
from .engine.handle import Handle as Handle
from .engine.health import Health as Health
from .engine.health import Usage as Usage
from .engine.load_options import LoadOptions as LoadOptions
from .engine.receipt import Receipt as Receipt
from .engine.replay import Replay as Replay
from .errors import SpecbuildError as SpecbuildError
from .requests.chat import Chat as Chat
from .requests.chat_session import ChatSession as ChatSession
from .requests.metrics import RequestMetrics as RequestMetrics
from .requests.metrics import RunStats as RunStats
from .requests.metrics import SpeculationStats as SpeculationStats
from .requests.result import Chunk as Chunk
from .requests.result import Result as Result
from .requests.tokenizer import Prompt as Prompt
from .sampling.constraint import Constraint as Constraint
from .sampling.constraint import Matcher as Matcher
from .sampling.logprobs import TokenLogprobs as TokenLogprobs
from .sampling.parameters import SamplingParams as SamplingParams
from .sampling.structured import StructuredOutputs as StructuredOutputs
from .speculation.draft_limits import Limits as Limits
from .speculation.tree import TreeSpec as TreeSpec
