"""The tutorial shows what its commands print, and is written anew by one command."""

from pathlib import Path

import stopmim
import tutorial

MINI = """# Mini

Run <!-- made -->?<!-- end -->.

```sh
printf 'a\\rb\\n'
echo c >&2
touch kept
```

<!-- output -->
old
<!-- end -->

```python
print(*range(9), sep="\\n")
open("kept")
```

<!-- output: 1 first, 2 last -->
<!-- end -->

```sh
echo of no interest
```
"""


def test_output_is_written_where_the_page_asks_for_it(tmp_path: Path) -> None:
    text = tutorial.filled(MINI, tmp_path)
    first, second = (block.shown for block in tutorial.blocks(text))
    assert first == "\n```text\nb\nc\n```\n\n"  # both streams, a line drawn twice as it ended
    assert second == "\n```text\n0\n...\n7\n8\n```\n\n"  # in the same folder
    assert "no interest\n```\n" in text
    assert "stopmim " in text.split("<!-- made -->")[1].split("<!-- end -->")[0]
    assert tutorial.filled(text, tmp_path) == text


def test_every_block_of_the_tutorial_is_followed_by_its_output() -> None:
    text = tutorial.PAGE.read_text()
    found = tutorial.blocks(text)
    assert len(found) == text.count("```sh\n") + text.count("```python\n")
    assert all("```text\n" in block.shown for block in found), "run `make tutorial`"
    assert "\n<!-- made" not in text  # there a comment would end the paragraph
    assert f"stopmim {stopmim.__version__}, " in text, "run `make tutorial`"
