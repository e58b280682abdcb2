"""What is inside the page, and, where node is found, that its JavaScript is PyTorch."""
import base64
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import write_model

import analyze
from checkpoint import Loaded, TASKS
from data import images, text
from flags import UserError
from web import page

TINY = dict(width=16, heads=2, layers=2, head_dim=10)
EVIL = "</script><script>alert(1)</script>"
# task, fields of the config; all with weights that are not at their initial values
KINDS = {
    "class token": ("vit", dict(pool="class", stem="plain")),
    "mean": ("vit", dict(pool="mean", eta=0.3, lambd=0.02)),
    "sincos": ("vit", dict(head_dim=8, positions="sincos", final_norm=True)),
    "autoencoder": ("mae", dict(decoder_layers=3)),
    "text": ("gpt", dict(rotary=True)),
    "text, shift": ("gpt", dict(head_dim=8, shift=True)),
}


def a_model(task, **fields):
    """A model for shapes or the rhyme, every tensor drawn."""
    size = (dict(context=12, vocab_size=5) if task == "gpt" else
            dict(image_size=32, patch_size=8, classes=10))
    kind, config = TASKS[task], TASKS[task].config_class
    model = kind(config(**TINY | size | fields)).eval()
    for name, tensor in model.named_parameters():
        torch.nn.init.normal_(tensor.data, mean="norm" in name, std=0.2)
    return model


def a_page(task, model, cache, text_cache):
    """Its text, the content that it has for the scripts, and the untrained model in it."""
    data = text.load("verse", text_cache) if task == "gpt" else images.load("shapes", cache)
    data.classes = [EVIL] * 10
    model.half().float()        # as the page keeps it
    loaded = Loaded(task, model, getattr(model, "encoder", model), {}, {})
    other = loaded._replace(model=TASKS[task](model.config))
    written = page.html(EVIL, loaded, other, data, data.val if task == "gpt" else None)
    return written, json.loads(re.search('json">(.*?)</script>', written)[1]), other.model


def decoded(words, dtype):
    return np.frombuffer(base64.b64decode(words), dtype)


def of_first_example(model, data):
    """What PyTorch makes of the content's first picture or its text."""
    if data["task"] == "gpt":
        ids = text.CharTokenizer(data["characters"]).encode(data["text"]).astype(np.int64)
        return model(torch.from_numpy(ids)[None])
    pixels = decoded(data["pictures"], np.uint8).reshape(8, 32, 32, 3)[:1].copy()
    x = images.model_input(torch.from_numpy(pixels), SimpleNamespace(**data), 32)
    if data["task"] != "mae":
        return model(x)
    masked = torch.zeros(1, 16, dtype=torch.bool)
    masked[0, data["masked"]] = True
    return model.predicted(x, masked)


@pytest.mark.parametrize("kind", ["mean", "autoencoder", "text"])
@torch.no_grad()
def test_what_is_inside(kind, cache, text_cache):
    """Weights, the first example and what PyTorch makes of it, line numbers; no end of a script."""
    task, fields = KINDS[kind]
    model = a_model(task, **fields)
    written, data, other = a_page(task, model, cache, text_cache)
    assert written.count("<script") == written.count("</script>") == 3
    assert "://" not in written.replace("http://www.w3.org", "")
    assert [name for name, *_ in data["tensors"]] == [*model.state_dict()]
    for kept, each in (("trained", model), ("untrained", other.half())):
        tensors = [t.numpy().ravel() for t in each.state_dict().values()]
        assert np.array_equal(decoded(data[kept], np.float16), np.concatenate(tensors))
    assert task == "gpt" or len(set(data["labels"])) == 8 and data["classes"][0] == EVIL
    expected = torch.from_numpy(decoded(data["expected"], np.float32).copy())
    torch.testing.assert_close(expected, of_first_example(model, data).flatten())


NODE = """
const pages = JSON.parse(require("fs").readFileSync(0, "utf8"));
const element = () => ({                                        // what page.js asks of one
  children: [], nextElementSibling: {}, querySelectorAll: () => [], click() { this.onclick(); },
  append(...more) { this.children.push(...more); },
  replaceChildren(...all) { this.children = all; }, get firstChild() { return this.children[0]; },
  get valueAsNumber() { return Number(this.value); }, getContext: () => ({putImageData() {}})});
console.log(JSON.stringify(pages.map(page => {
  const [crate, script] = page.split("<script>").slice(1).map(part => part.split("</script>")[0]);
  const boxes = [...page.matchAll(/ id="(\\w+)"/g)].map(([, id]) => Object.assign(element(), {id}));
  boxes.find(({id}) => id === "data").textContent = page.split('json">')[1].split("</script>")[0];
  const browser = {
    document: {body: {}, createElement: element, querySelectorAll: which =>
      which === "[id]" ? boxes : []},
    ImageData: function (w, h) { this.data = new Uint8ClampedArray(4 * w * h); },
    requestAnimationFrame: now => now(), cancelAnimationFrame() {}};
  return new Function(...Object.keys(browser), crate + script + `;
    const A = models.trained.layers.map(L => L.T.A.map(M => Array.from({length: M.rows},
      (_, i) => [...rowAt(M, i)])));
    const first = {worst, verdict: byId.verdict.children[0], attention: A};
    set({eta: 0.2, lambd: 0.03, off: ["1.2"]});
    const {rows, cols, at} = logits();
    return {...first, out: [...at.subarray(0, rows * cols)],
      untrained: check(data, models.untrained)};`)(...Object.values(browser));
})));
"""


@pytest.fixture(scope="module")
def computed(cache, text_cache):
    """{kind: (model, content, what node computes of its page)}."""
    if shutil.which("node") is None:
        pytest.skip("no node")
    found, pages = {}, []
    for kind, (task, fields) in KINDS.items():
        torch.manual_seed(len(pages))
        model = a_model(task, **fields)
        written, data, _ = a_page(task, model, cache, text_cache)
        pages.append(written)
        found[kind] = model, data
    node = subprocess.run(["node", "-e", NODE], input=json.dumps(pages), capture_output=True,
                          text=True)
    assert node.returncode == 0, node.stderr
    return {kind: (*found[kind], result) for kind, result in zip(KINDS, json.loads(node.stdout))}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_javascript_is_pytorch(kind, computed):
    """Logits, attention and the share in the verdict; then logits with other knobs and
    a head off."""
    model, data, got = computed[kind]
    assert got["worst"] < 2e-5 < 1e-3 < got["untrained"]
    encoder = getattr(model, "encoder", model)
    entered, layers = [], [*encoder.layers]
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, args: entered.append(args[0]))
    wanted = of_first_example(model, data)
    if data["task"] in ("vit", "gpt"):
        share = 100 * wanted.flatten(0, -2)[-1].softmax(-1).max().item()
        assert float(got["verdict"].split()[-2]) == pytest.approx(share, abs=0.06)
    for layer, Z, maps in zip(layers, entered[:2], got["attention"]):
        for rows, weights in zip(maps, layer.trace(Z).attention[0], strict=True):
            for row, ours in zip(rows, weights, strict=True):
                assert row == pytest.approx(ours[:len(row)].tolist(), rel=1e-3, abs=1e-5)

    for layer in [*layers, *getattr(model, "decoder", [])]:
        if sparsification := getattr(layer, "sparsification", None):
            sparsification.eta, sparsification.lambd = 0.2, 0.03
    attention = layers[0].attention
    attend = attention.attend
    kept = torch.arange(attention.heads)[:, None, None] != 1
    attention.attend = lambda *qkv: attend(*qkv) * kept
    out, wanted = torch.tensor(got["out"]), of_first_example(model, data)
    torch.testing.assert_close(out[-wanted.numel():], wanted.flatten(), rtol=1e-3, atol=1e-4)


def test_what_it_cannot_run(cache, text_cache):
    with pytest.raises(UserError, match="causal") as error:
        a_page("gpt", a_model("gpt", causal=False), cache, text_cache)
    assert "\n" not in str(error.value)


def test_the_command(tmp_path, cache, capsys):
    path = tmp_path / "a.pt"
    write_model(path, a_model("vit"), "vit", images.load("shapes", cache).meta())
    analyze.main(["page", f"--ckpt={path}", f"--data_dir={cache}", f"--out={tmp_path}/a.html"])
    assert capsys.readouterr().out == f"wrote {tmp_path}/a.html\n"
    assert '/a", "task"' in (tmp_path / "a.html").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="of arch transformer"):     # before it looks for the data
        analyze.main(["page", "--ckpt=pretrained:cifar10-transformer", f"--data_dir={tmp_path}"])
