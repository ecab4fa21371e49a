"""Main text of HTML pages: zero2all, trafilatura and resiliparse on the same pages in the same run.

    python -m benchmarks.page_text --articles FOLDER --markdown NAME=FOLDER:LANGUAGE … --work SCRATCH

`--articles`: a checkout of scrapinghub/article-extraction-benchmark, 181 pages of news and blogs with the text of the
article; its own `evaluate.py` compares (shingles of four words). `--markdown`: folders of Markdown; of each language
150 files are rendered and put into three site templates below (navigation, sidebars, related posts, cookie banner,
footer), and compared with what the Markdown says; every Han character is a word. The extractor was developed on the
pages at even places of both sets, so those at odd places are also shown alone. Titles are no part of the comparison.

CPU time of one process per tool, after a first round over ten pages, fastest of three rounds, pages in memory. The
others run in a virtual environment of their own, `SCRATCH/venv`, made when it is not there, and so does zero2all.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.machine import save_result

PAGES_A_LANGUAGE = 150
PACKAGES = ("trafilatura", "resiliparse", "lxml_html_clean")
NAMES = ("trafilatura", "resiliparse", "lxml")
TOOLS = ("zero2all", "trafilatura", "trafilatura fast", "resiliparse")
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)

RUNNER = """
import json, sys, time
name, path = sys.argv[1:]
pages = [page.encode() for page in json.load(open(path))]
if name == "zero2all":
    from zero2all.corpus.readers.pages import read_page
    run = lambda page: read_page(page).content
elif name == "resiliparse":
    from resiliparse.extract.html2text import extract_plain_text
    run = lambda page: extract_plain_text(page.decode(), main_content=True, comments=False)
else:
    from trafilatura import extract
    run = lambda page: extract(page.decode(), include_comments=False, fast=name.endswith("fast"))
for page in pages[:10]:
    run(page)
best = None
for _ in range(3):
    start = time.process_time()
    texts = [run(page) or "" for page in pages]
    taken = time.process_time() - start
    best = min(taken, best or taken)
print(json.dumps({"seconds": best, "texts": texts}))
"""


def main() -> None:
    """Run all, print the tables, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--articles", type=Path, required=True)
    parser.add_argument("--markdown", nargs="+", metavar="NAME=FOLDER:LANGUAGE", required=True)
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    metric = load_metric(arguments.articles / "evaluate.py")
    python = make_environment(arguments.work / "venv")
    articles = read_articles(arguments.articles)
    sites = read_sites(arguments.markdown)
    results = {"versions": versions(python)}
    results["articles"] = compare(python, arguments.work, metric, *articles, groups={})
    metric.__dict__["_TOKEN_RE"] = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+")
    by_group = {name: [n for n, group in enumerate(sites[2]) if name in group] for name in sorted({*sum(sites[2], ())})}
    results["sites"] = compare(python, arguments.work, metric, *sites[:2], groups=by_group)
    save_result("page_text", results)


def load_metric(path: Path) -> ModuleType:
    """The `evaluate.py` of the benchmark."""
    spec = importlib.util.spec_from_file_location("article_metric", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_environment(folder: Path) -> Path:
    """The Python of a virtual environment with the other tools."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    """What is installed there."""
    code = "import json; from importlib.metadata import version as v; print(json.dumps({n: v(n) for n in %r}))"
    run = subprocess.run(
        [str(python), "-c", code % (("trafilatura", "resiliparse", "lxml"),)], check=True, capture_output=True
    )
    return dict(json.loads(run.stdout))


def compare(
    python: Path, work: Path, metric: ModuleType, pages: list[str], gold: list[str], groups: dict[str, list[int]]
) -> dict[str, Any]:
    """F1, precision, recall and time of every tool, on all pages, on those not developed on, and on groups of them."""
    path = work / "pages.json"
    path.write_text(json.dumps(pages))
    parts = {"all": list(range(len(pages))), "held out": list(range(1, len(pages), 2)), **groups}
    results: dict[str, Any] = {}
    print(f"\n{len(pages)} pages, {sum(map(len, pages)) / len(pages) / 1000:.0f} thousand characters each")
    for tool in TOOLS:
        run = subprocess.run([str(python), "-c", RUNNER, tool, str(path)], check=True, capture_output=True)
        out = json.loads(run.stdout)
        found = {"ms_a_page": round(1000 * out["seconds"] / len(pages), 2)}
        for part, numbers in parts.items():
            rows = [metric.string_shingle_matching(gold[n], out["texts"][n]) for n in numbers]
            found[part] = {name: round(value, 4) for name, value in metric.metrics_from_tp_fp_fns(rows).items()}
        results[tool] = found
        print(
            f"{tool:18}{found['ms_a_page']:8.2f} ms", *(f"{part} {found[part]['f1']:.3f}" for part in parts), sep="  "
        )
    return results


def read_articles(folder: Path) -> tuple[list[str], list[str]]:
    """Pages of news and their texts."""
    truth = json.loads((folder / "ground-truth.json").read_text(encoding="utf-8"))
    names = sorted(truth)
    pages = [gzip.decompress((folder / "html" / f"{name}.html.gz").read_bytes()).decode() for name in names]
    return pages, [truth[name]["articleBody"] for name in names]


def read_sites(sources: Sequence[str]) -> tuple[list[str], list[str], list[tuple[str, ...]]]:
    """Pages made of Markdown, what they say, and the groups each belongs to."""
    from lxml import html
    from markdown_it import MarkdownIt

    render = MarkdownIt("commonmark").enable("table").render
    folders: dict[str, list[Path]] = {}
    for source in sources:
        _, _, place = source.partition("=")
        folder, _, language = place.rpartition(":")
        folders.setdefault(language, []).append(Path(folder))
    pages: list[str] = []
    gold: list[str] = []
    groups: list[tuple[str, ...]] = []
    for language, inputs in sorted(folders.items()):
        chance = random.Random(language)
        bodies: list[tuple[str, str, str]] = []
        for base in inputs:
            files = sorted(base.rglob("*.md"))
            chance.shuffle(files)
            count = 0
            for file in files:
                text = file.read_text(encoding="utf-8")
                title = re.search(r"^(?:title:|#)\s*[\"']?(.+?)[\"']?\s*$", text, re.MULTILINE)
                body = re.sub(r"\A\s*# .*\n", "", FRONT_MATTER.sub("", text))
                inner = render(body)
                said = html.fromstring(f"<div>{inner}</div>").text_content() if inner.strip() else ""
                if title and 1000 < len(said.encode()) < 60_000:
                    bodies.append((title[1], inner, said))
                    count += 1
                if count == -(-PAGES_A_LANGUAGE // len(inputs)):
                    break
        chance.shuffle(bodies)
        for number, (title_text, inner, said) in enumerate(bodies[:PAGES_A_LANGUAGE]):
            others = [bodies[chance.randrange(len(bodies))] for _ in range(8)]
            template = TEMPLATES[number // 2 % len(TEMPLATES)]
            pages.append(template(language, title_text, inner, [(name, _teaser(text)) for name, _, text in others]))
            gold.append(said)
            groups.append((language, template.__name__))
    return pages, gold, groups


def _teaser(text: str) -> str:
    return " ".join(text.split())[:140] + "…"


# ruff: noqa: E501 - templates of pages
# ---- three sites ----------------------------------------------------------------------------------------------

WORDS = {
    "zh": {
        "menu": "首页 产品 文档 教程 博客 社区 下载 关于我们 联系我们 登录 注册",
        "cookie": "我们使用 Cookie 来改善您的浏览体验并分析网站流量。继续使用本网站即表示您同意我们的隐私政策。",
        "accept": "全部接受", "related": "相关文章", "share": "分享到 微博 微信 QQ空间", "next": "下一篇",
        "footer": "版权所有 © 2024 示例科技有限公司 保留所有权利。京ICP备00000000号", "by": "作者：张三 发布于 2024-03-05 阅读 1024 次",
        "sign": "订阅我们的邮件，每周收到精选内容。", "help": "这个页面对您有帮助吗？", "toc": "本页目录", "hot": "热门推荐",
        "comment": "写得很好，对我帮助很大，谢谢作者的分享！希望以后能看到更多这样的文章。", "comments": "评论",
    },
    "en": {
        "menu": "Home Products Docs Tutorials Blog Community Downloads About Contact Login Register",
        "cookie": "We use cookies to improve your experience and to analyse our traffic. By using this site you accept our "
        "privacy policy.",
        "accept": "Accept all", "related": "Related articles", "share": "Share on Facebook Twitter LinkedIn", "next": "Next",
        "footer": "Copyright © 2024 Example Technology Ltd. All rights reserved. Terms Privacy Imprint",
        "by": "By Jane Doe, 5 March 2024, 7 min read", "sign": "Subscribe to our newsletter and get the best of it weekly.",
        "help": "Was this page helpful to you?", "toc": "On this page", "hot": "Most read",
        "comment": "Great write-up, this helped me a lot. Thank you for sharing it, and please write more of these posts!",
        "comments": "Comments",
    },
}  # fmt: skip

Teasers = list[tuple[str, str]]


def _links(names: Sequence[str]) -> str:
    return "".join(f'<li><a href="/{number}">{escape(name)}</a></li>' for number, name in enumerate(names))


def blog(language: str, title: str, body: str, others: Teasers) -> str:
    """A blog with today's elements: header, nav, article, aside, comments, footer."""
    w = WORDS[language]
    cards = "".join(
        f'<div class="card"><h3><a href="/p">{escape(name)}</a></h3><p>{escape(text)}</p></div>'
        for name, text in others[:4]
    )
    notes = f"<li><b>user</b><p>{w['comment']}</p></li>" * 3
    return f"""<!DOCTYPE html><html lang="{language}"><head><meta charset="utf-8"><title>{escape(title)} | Example</title></head>
<body class="post-template"><div id="cookie-notice" role="dialog"><p>{w["cookie"]}</p><button>{w["accept"]}</button></div>
<header class="site-header"><a href="/">Example</a><nav><ul>{_links(w["menu"].split())}</ul></nav></header>
<main><article class="post"><h1>{escape(title)}</h1><p class="meta">{w["by"]}</p><div class="share">{w["share"]}</div>
<div class="post-content">{body}</div><div class="tags"><a href="/t">tag</a> <a href="/u">news</a></div></article>
<section class="related-posts"><h2>{w["related"]}</h2>{cards}</section>
<section id="comments"><h2>{w["comments"]}</h2><ol>{notes}</ol></section></main>
<aside class="sidebar"><h3>{w["hot"]}</h3><ul>{_links([name for name, _ in others])}</ul><form><p>{w["sign"]}</p><input></form></aside>
<footer><p>{w["footer"]}</p></footer></body></html>"""


def manual(language: str, title: str, body: str, others: Teasers) -> str:
    """A site of documentation made by a framework: divs with generated names, a tree of links, contents of the page."""
    w = WORDS[language]
    headings = re.findall(r"<h2>(.*?)</h2>", body)
    contents = "".join(f'<li><a href="#s{number}">{heading}</a></li>' for number, heading in enumerate(headings))
    tree = "".join(
        f"<div><div>{escape(name)}</div><ul>{_links([name for name, _ in others])}</ul></div>" for name, _ in others
    )
    return f"""<!DOCTYPE html><html lang="{language}"><head><title>{escape(title)} - Example Docs</title><style>a{{}}</style></head>
<body><div id="__next"><div class="css-1x7h"><div class="css-aa1"><a href="/">Example Docs</a>
{"".join(f'<a href="/{n}">{n}</a>' for n in w["menu"].split())}</div>
<div class="css-9k2"><div class="css-3t1">{tree}</div>
<div class="css-b71"><div class="css-c01"><a href="/">Docs</a> / <a href="/g">Guide</a> / <span>{escape(title)}</span></div>
<h1 class="css-h1">{escape(title)}</h1><div class="css-m0">{body}</div>
<div class="css-f1"><span>{w["help"]}</span><button>👍</button><button>👎</button></div>
<div class="css-f2"><a href="/n">{w["next"]}: {escape(others[0][0])}</a></div></div>
<div class="css-t0"><div>{w["toc"]}</div><ul>{contents}</ul></div></div>
<div class="css-z9"><div>{w["footer"]}</div><div>{"".join(f'<a href="/{n}">{n}</a> ' for n in w["menu"].split())}</div></div>
<div class="css-k8"><div>{w["cookie"]}</div><a href="#" class="css-btn">{w["accept"]}</a></div></div></div>
<script>window.__DATA__={{"title":"x"}}</script></body></html>"""


def portal(language: str, title: str, body: str, others: Teasers) -> str:
    """A portal of the older kind: tables for the layout, bars of links, teasers around and below the text."""
    w = WORDS[language]
    bar = " | ".join(f'<a href="/{n}">{n}</a>' for n in w["menu"].split())
    left = "".join(f'<tr><td>·<a href="/x">{escape(name)}</a></td></tr>' for name, _ in others)
    below = "".join(f'<p><a href="/x">{escape(name)}</a><br>{escape(text)}</p>' for name, text in others[4:])
    return f"""<html><head><meta http-equiv="Content-Type" content="text/html; charset=utf-8"><title>{escape(title)}_Example</title>
</head><body><center><table width="960"><tr><td><img src="logo.gif"></td><td>{bar}</td></tr></table>
<table width="960"><tr><td width="200" valign="top"><table><tr><td><b>{w["hot"]}</b></td></tr>{left}</table></td>
<td valign="top"><table width="100%"><tr><td align="center"><h1>{escape(title)}</h1></td></tr>
<tr><td align="center"><font color="gray">{w["by"]}</font></td></tr><tr><td><div id="zoom">{body}</div></td></tr>
<tr><td>{w["share"]}</td></tr><tr><td><b>{w["related"]}</b>{below}</td></tr></table></td></tr></table>
<table width="960"><tr><td align="center">{bar}<br>{w["footer"]}</td></tr></table><div>{w["cookie"]}</div></center></body></html>"""


TEMPLATES = (blog, manual, portal)


if __name__ == "__main__":
    main()
