"""The page of a run in a real browser: a headless Chromium loads it and reports what it shows."""

import html
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from trainer_files import fit, write_clicks, write_config

import persia

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not BROWSER, reason="no browser here (Debian: apt-get install chromium)"),
]

NAME = "<b>clicks & co.parquet"
PROBE = """<!doctype html><meta charset=utf-8><style>body{margin:0}iframe{border:0;width:100vw;height:4000px}</style>
<iframe src="report.html"></iframe><script>
document.querySelector("iframe").onload = event => {
  const page = event.target.contentDocument, image = page.querySelector("img");
  document.body.textContent = JSON.stringify({
    title: page.title, headings: [...page.querySelectorAll("h1, h2")].map(each => each.textContent),
    cells: [...page.querySelectorAll("tr")].map(row => [...row.cells].map(cell => cell.textContent)),
    image: [image.naturalWidth, image.clientWidth], width: [page.documentElement.scrollWidth, window.innerWidth],
    loaded: event.target.contentWindow.performance.getEntriesByType("resource").map(each => each.name),
  });
};</script>"""


def seen(folder: Path, width: int) -> dict[str, Any]:
    """Return what the browser shows of the folder's ``report.html`` in a window of this width, in pixels."""
    (folder / "probe.html").write_text(PROBE)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--hide-scrollbars"]
    options += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", "--virtual-time-budget=10000"]
    command = [BROWSER, *options, "--dump-dom", (folder / "probe.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    start, end = dom.index("{", dom.index("<body")), dom.rindex("}")
    found: dict[str, Any] = json.loads(html.unescape(dom[start : end + 1]))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run. The name of its file has characters of HTML."""
    folder = tmp_path_factory.mktemp("page")
    write_clicks(folder / NAME, 1_000)
    trainer, _ = fit(persia.load_config(write_config(folder, data={"batch_size": 256, "train": NAME})))
    assert trainer.folder is not None
    return trainer.folder.path


def test_the_page_of_a_run_in_a_browser(folder: Path) -> None:
    wide = seen(folder, 1200)
    summary = json.loads((folder / "summary.json").read_text())
    assert wide["title"] == f"persia: {folder.name}"
    assert wide["headings"][0] == f"Run {folder.name}" and "Curves" in wide["headings"]
    assert ["status", summary["status"]] in wide["cells"] and summary["status"] == "finished"
    assert any(NAME in cell for row in wide["cells"] for cell in row)
    assert ["steps", str(summary["step"])] in wide["cells"]
    assert wide["image"][0] > 500, "the curves are not decoded"
    assert [name for name in wide["loaded"] if not name.startswith("data:")] == []  # the page works without a network


def test_the_page_fits_a_narrow_window(folder: Path) -> None:
    narrow = seen(folder, 500)  # the smallest window of Chromium
    assert narrow["width"][0] <= narrow["width"][1], "the page must be scrolled sideways"
    assert narrow["image"][1] < narrow["image"][0]
