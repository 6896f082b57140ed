"""Arms: who is drawn for which arm, which models are compared, and by which metrics."""

import ended
import pytest

from specbuild.runtime.errors import OptionError
from specbuild.serve.canary import canary_objectives as ceilings
from specbuild.serve.canary.assignment import CanaryOptions, Draws
from specbuild.serve.canary.comparison import arms_of, metrics_of


def test_a_key_keeps_its_arm_and_counts_once():
    draws, keys = Draws("salt"), [f"key{number}" for number in range(2000)]
    first, again, more = ([draws.draw(key, weight) for key in keys] for weight in (0.3, 0.3, 0.6))
    assert [each.candidate for each in first] == [each.candidate for each in again]
    assert ({each.fresh for each in first}, {each.fresh for each in again}) == ({True}, {False})
    assert 520 < sum(each.candidate for each in first) < 680
    assert [each.number for each in [*first, *again]] == list(range(4000))
    assert all(later.candidate for earlier, later in zip(first, more, strict=True) if earlier.candidate)
    for number in range(20_000):
        draws.draw(str(number), 0.5)
    assert draws.draw(keys[0], 0.3).fresh, "the oldest goes"


ARMS = """
speculation=chain:4 asked aa
model=b asked ab
model=a asked ba
model=x asked
speculation=tree asked
speculation=chain:8 asked
speculation=off speculation=chain:9
"""


@pytest.mark.parametrize("line", ARMS.strip().splitlines())
def test_the_first_model_is_compared_with_itself_or_with_another(line):
    candidate, baseline, *found = line.split()
    models, options = ended.models("a", "b", "c").all, CanaryOptions(candidate=candidate, baseline=baseline)
    if found:
        assert ["".join(model.name for model in arms_of(models, options))] == found
    else:
        with pytest.raises(OptionError):
            arms_of(models, options)


def test_what_is_compared():
    """Acceptance between bundles alone; what is ignored decides nothing."""

    def names(candidate="speculation=off", *ignore):
        return [each.name for each in metrics_of(CanaryOptions(candidate=candidate, ignore=ignore))]

    assert names() == ["ttft", "tpot", "e2el", "errors", "cut", "tokens", "invalid"]
    assert names("model=b") == [*names(), "acceptance"]
    assert names("speculation=off", "ttft", "invalid") == ["tpot", "e2el", "errors", "cut", "tokens"]
    with pytest.raises(OptionError, match="ignore fewer"):
        names("speculation=off", "ttft", "tpot", "errors")


def test_ceilings_of_shares_and_times():
    """They may be mixed and repeated; a request says nothing of what it has not."""
    found = ceilings.parse(["errors=0.01,ttft=0.5,tpot=0.05,p99", " cut = 0.3 ", "e2el=2,p50"])
    assert {each.name: pytest.approx(each.share) for each in found} == {
        **{"errors<=0.01": 0.01, "cut<=0.3": 0.3, "ttft_p99<=0.5": 0.01, "tpot_p99<=0.05": 0.01, "e2el_p50<=2": 0.5}
    }
    told = {"errors": 0.0, "cut": 0.25, "ttft": 0.6}
    assert dict(ceilings.held(found, told)) == {"errors<=0.01": 0.0, "cut<=0.3": 0.25, "ttft_p99<=0.5": 1.0}
    with pytest.raises(OptionError, match="no time before it"):
        ceilings.parse(["errors=0.1,p99"])
