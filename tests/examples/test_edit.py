"""The edit: the old text is drafted from, and the new one is that of plain decoding."""

import re

from specbuild.runtime import Engine, SamplingParams

OLD = "def parse_arguments(argv):\n    if not argv:\n        return None\n    return argv[0]\n" * 2


def test_the_old_text_is_drafted_from(example, bundle, tmp_path, capsys):
    file = tmp_path / "old.py"
    file.write_text(OLD, encoding="utf-8")
    assert example("edit").main(str(bundle), str(file), "Rename it.", 80) == 0
    out, err = capsys.readouterr()
    with Engine.load(bundle) as engine:
        prompt = f"# Rename it.\n# Before:\n{OLD}\n# After:\n"
        (plain,) = engine.generate(prompt, SamplingParams(max_new_tokens=80, speculation="off"))
    assert out == plain.text + "\n"
    accepted, predicted = map(int, re.findall(r"\d+", err))
    assert 0 <= accepted <= predicted
    assert predicted > 0
