"""The lesson is what its sources say, and runs in a browser as PyTorch does."""
import base64
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

import analyze
from flags import ROOT
from web import lesson
from web.mathml import mathml

BUILT = ROOT / "docs" / "index.html"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NUMBER = r"\d+(?:\.\d+)?"


def test_mathml():
    """Scripts beside a letter and above a sum, groups, numbers, roots, words in one piece."""
    assert mathml("U_k^*Z") == (
        '<mrow><msubsup><mi>U</mi><mi>k</mi><mo lspace="0" rspace="0" stretchy="false">∗</mo>'
        "</msubsup><mi>Z</mi></mrow>")
    assert mathml("∑_k^K k").startswith("<mrow><munderover><mo")
    assert mathml("½ logdet 10") == (
        "<mrow><mn>½</mn><mtext>logdet</mtext><mn>10</mn></mrow>")
    assert "<msub><mi>U</mi><mrow><msub><mi>s</mi><mi>i</mi></msub></mrow></msub>" in (
        mathml("U_{s_i}√d"))
    assert mathml("√d") == "<mrow><msqrt><mi>d</mi></msqrt></mrow>"


def test_code_is_cut_out_of_the_files():
    """A method and a function without docstrings; nothing that no file has."""
    lines = lesson.code("crate.ISTA.forward").splitlines()
    source = (ROOT / "crate.py").read_text()
    assert lines[1] == "<code>def forward(self, Z):</code>" and "return F.relu(Z - " in lines[-1]
    assert all(re.sub("</?(?:code|pre)>", "", line).strip() in source for line in lines[1:])
    assert lesson.code("crate.coding_rate").count("\n") == 3
    with pytest.raises(AttributeError):
        lesson.code("crate.MSSA.backward")


def parts_of(page):
    """(its text with numbers blanked, these, the data without arrays, the arrays)."""
    data = json.loads(re.search('json">(.*?)</script>', page)[1])
    arrays = [np.frombuffer(base64.b64decode(words), dtype).astype(float) for words, dtype in (
        (data.pop("pictures"), np.uint8), (data.pop("many"), np.uint8),
        (data.pop("trained"), np.float16), (data.pop("untrained"), np.float16),
        (data.pop("expected"), np.float32))]
    rest = re.sub('json">.*?</script>', "", page), json.dumps(data)
    words = [re.sub(NUMBER, "#", part) for part in rest]
    numbers = [float(number) for part in rest for number in re.findall(NUMBER, part)]
    return words, numbers, arrays


def test_built_from_the_sources():
    """On the machine that built it byte for byte; elsewhere numbers may differ a little."""
    old, new = BUILT.read_text("utf-8"), lesson.written()
    assert len(old.encode()) < 700_000
    text = re.sub(r"<(script|style).*?</\1>", "", old, flags=re.DOTALL)
    assert not re.findall(r"\$|\{\w+", text)            # all is filled in
    assert not re.findall(r'(?:src|url\(|@import|fetch\()\s*=?\s*["\']?(?:https?:)?//', old)
    if old != new:
        words, numbers, arrays = parts_of(old)
        new_words, new_numbers, new_arrays = parts_of(new)
        assert words == new_words, "run python -m web.lesson"
        np.testing.assert_allclose(new_numbers, numbers, rtol=0.02, atol=1.01)
        for ours, theirs in zip(new_arrays, arrays, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1.01)


def in_browser(path, tmp_path, filled):
    """The document of the page when its scripts have run: when the element `filled` has words. On a
    busy machine a browser may end before it draws, so it gets five attempts."""
    for attempt in range(5):
        document = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
             "--no-first-run", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", f"--user-data-dir={tmp_path}/browser{attempt}",
             "--virtual-time-budget=20000", "--dump-dom", f"file://{path}"],
            capture_output=True, text=True, timeout=120).stdout
        if re.search(f'id="{filled}"[^>]*>[^<]', document):
            break
    return document


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_lesson_in_a_browser(tmp_path):
    """The page compares its numbers with PyTorch's, and moves every knob."""
    document = in_browser(f"{BUILT}#test", tmp_path, "agree")
    said = re.search('id="agree">(.*?)</small>', document, re.DOTALL)[1]
    assert said.startswith("PASS"), said


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("name, heading", [
    ("shapes-crate", "It sees"), ("shapes-mae", "It fills in"), ("pydoc-crate", "After")])
def test_a_page_in_a_browser(name, heading, tmp_path):
    analyze.main(["page", f"--ckpt=pretrained:{name}", f"--out={tmp_path}/page.html"])
    document = in_browser(f"{tmp_path}/page.html", tmp_path, "verdict")
    assert re.search(f'id="verdict"[^>]*>{heading}', document)
    assert re.search('id="alarm"[^>]* hidden', document)
