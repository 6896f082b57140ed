"""Comparisons: which models a canary is between, and by which metrics."""

from __future__ import annotations

import ended
import pytest
from serving import Log

from specbuild.runtime.errors import OptionError
from specbuild.serve.arms import CanaryOptions
from specbuild.serve.comparison import arms_of, metrics_of, scorer_of
from specbuild.serve.models import Models


def test_the_first_model_is_compared_with_itself_or_with_another() -> None:
    models = ended.models("a", "b", "c")
    a, b, _ = models.all
    assert arms_of(models.all, CanaryOptions(candidate="speculation=chain:4")) == (a, a)
    assert arms_of(models.all, CanaryOptions(candidate="model=b")) == (a, b)
    assert arms_of(models.all, CanaryOptions(candidate="model=a")) == (b, a)


@pytest.mark.parametrize(
    ("names", "given", "words"),
    [
        ("ab", {"candidate": "model=x"}, "besides one of a, b"),
        ("a", {"candidate": "model=a"}, "model=a"),
        ("a", {"candidate": "speculation=tree"}, "unknown tree"),
        ("a", {"candidate": "speculation=chain:8"}, "at most 7"),
        ("a", {"candidate": "speculation=off", "baseline": "speculation=chain:9"}, "at most 7"),
    ],
)
def test_what_cannot_be_compared_is_refused(names: str, given: dict[str, str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        arms_of(ended.models(*names).all, CanaryOptions(**given))  # type: ignore[arg-type]


def test_acceptance_and_quality_are_compared_between_bundles_alone() -> None:
    names = [each.name for each in metrics_of(CanaryOptions(candidate="speculation=off"), quality=False)]
    assert names == ["ttft", "tpot", "e2el", "errors", "cut", "tokens", "invalid"]
    more = [each.name for each in metrics_of(CanaryOptions(candidate="model=b"), quality=True)]
    assert more == [*names, "acceptance", "quality"]


def test_what_is_ignored_decides_nothing() -> None:
    less = CanaryOptions(candidate="speculation=off", ignore=("ttft", "invalid"))
    assert [each.name for each in metrics_of(less, quality=False)] == ["tpot", "e2el", "errors", "cut", "tokens"]
    with pytest.raises(OptionError, match="ignore fewer"):
        metrics_of(CanaryOptions(candidate="speculation=off", ignore=("ttft", "tpot", "errors")), quality=False)


def test_other_tokenizers_have_no_quality(log: Log) -> None:
    a, b = Models([ended.served("a"), ended.served("b", "another")]).all
    options = CanaryOptions(candidate="model=b")
    assert scorer_of(a, a, options, log) is not None  # type: ignore[arg-type]
    assert not log.lines
    assert scorer_of(a, b, options, log) is None  # type: ignore[arg-type]
    assert "tokenizers" in log.lines[-1]["message"]
