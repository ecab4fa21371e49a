"""Secrets and personal data, replaced by a short mark and counted.

The native scan says which texts can have any (an @ with a host behind it, ten digits close together, a long run of
letters and digits); cheap patterns say where, so that the others see only a few characters around each place. A mark is
never longer than what it hides, and what was hidden is not kept or logged anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from ipaddress import ip_address
from typing import NamedTuple

from zero2all.corpus.clean.config import Mask

MARKS = {
    "keys": "<key>",
    "id_numbers": "<id>",
    "bank_cards": "<card>",
    "ip_addresses": "<ip>",
    "emails": "<mail>",
    "phones": "<tel>",
    "addresses": "<addr>",
}
PHONE_DIGITS = 10
"""Fewest digits of a phone number that is masked."""
ID_DIGITS = 17
CARD_DIGITS = 13
IP_DIGITS = 6
LARGE_NUMBER = 20
"""An address has at least two numbers of this size; versions with four numbers rarely do."""
_TOKEN = re.compile("[A-Za-z0-9][A-Za-z0-9+/=_-]{15,}")
"""What may be a key."""

_EMAIL = re.compile(r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,63}")
_ID_NUMBER = re.compile(
    r"(?<![0-9A-Za-z])[1-9][0-9]{5}(?:18|19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])[0-9]{3}[0-9Xx]"
    r"(?![0-9A-Za-z])"
)
_ID_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
_PHONE = re.compile(
    r"(?<![0-9A-Za-z_.+-])(?:"
    r"(?:\+?86[- ]?)?1[3-9][0-9][- ]?[0-9]{4}[- ]?[0-9]{4}"  # mobile, China
    r"|(?:\(0[0-9]{2,3}\) ?|（0[0-9]{2,3}）|0[0-9]{2,3}[- ])[1-9][0-9]{6,7}"  # landline, China
    r"|\+[1-9][0-9]{0,2}(?:[ .-]?(?:\([0-9]{1,4}\)|[0-9]{1,4})){2,5}"  # international
    r"|(?:\([2-9][0-9]{2}\) ?|[2-9][0-9]{2}[.-])[0-9]{3}[.-][0-9]{4}"  # North America, 400 numbers
    r")(?![0-9A-Za-z_]|[.-][0-9])"
)
_CARD = re.compile(
    r"(?<![0-9A-Za-z_.+-])(?:"
    r"(?:4[0-9]{3}|5[1-5][0-9]{2}|2[2-7][0-9]{2}|60[0-9]{2}|64[4-9][0-9]|65[0-9]{2}|35[0-9]{2})(?:[ -]?[0-9]{4}){3}"
    r"|62[0-9]{2}(?:[ -]?[0-9]{4}){3}(?:[ -]?[0-9]{1,3})?"  # UnionPay
    r"|3[47][0-9]{2}[ -]?[0-9]{6}[ -]?[0-9]{5}"  # American Express
    r"|3[068][0-9]{2}[ -]?[0-9]{6}[ -]?[0-9]{4}"  # Diners
    r")(?![0-9A-Za-z_]|[.-][0-9])"
)
_IPV4 = re.compile(r"(?<![0-9A-Za-z_.+/-])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![0-9A-Za-z_]|[.-][0-9A-Za-z])")
_IPV6 = re.compile(r"(?<![0-9A-Za-z_.:])[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:){1,6}[0-9A-Fa-f]{0,4}(?![0-9A-Za-z_:])")
_VERSION = re.compile(r"(?:version|release|ver\.?|v\.?|版本号?|版)\W{0,3}$", re.IGNORECASE)
_HAN, _NUMBER = "[\u4e00-\u9fff]", "[0-9０-９A-Za-z一二三四五六七八九十甲乙丙丁]{1,5}"
_ADDRESS = re.compile(
    rf"(?P<place>(?:{_HAN}{{2,9}}?(?:省|自治区))?(?:{_HAN}{{2,9}}?(?:市|自治州|地区))?(?:{_HAN}{{1,9}}?[区县旗市])?"
    rf"(?:{_HAN}{{1,7}}?(?:街道|镇|乡))?)[\u4e00-\u9fff0-9]{{1,9}}?(?:大道|胡同|[路街巷弄里村道])(?:[东南西北中]段)?"
    rf"(?:[0-9]{{1,4}}弄)?(?:[0-9０-９]{{1,5}}(?:[-之][0-9]{{1,4}})?|[一二三四五六七八九十百]{{1,5}})号院?"
    rf"(?P<flat>(?:{_HAN}{{1,7}}?(?:小区|花园|大厦|公寓|广场|[苑园城]))?(?:{_NUMBER}(?:号楼|[栋幢座楼]))?(?:{_NUMBER}单元)?"
    rf"(?:{_NUMBER}层)?(?:[0-9]{{2,5}}[室号房]?)?)"
)
_PROVINCE = re.compile(
    "(?:北京|上海|天津|重庆)市?|(?:河北|山西|辽宁|吉林|黑龙江|江苏|浙江|安徽|福建|江西|山东|河南|湖北|湖南|广东|海南|四川|贵州|"
    "云南|陕西|甘肃|青海|台湾|内蒙古|广西|西藏|宁夏|新疆|香港|澳门)(?:省|.{0,3}自治区|特别行政区|[^省])"
)
_BEFORE_ADDRESS = re.compile(
    f"{_HAN}{{0,8}}?(?:[住坐落位][在于]|地址|住址|现住|家住|寄[到往]|送[到往]|[在于住到往至是为从])+"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:"
    r"[A-Za-z0-9+/=\s\\\"',:.()-]{0,20000}?-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    r"|(?:[\s\\\"',]{1,40}[A-Za-z0-9+/=]{16,20000})+)"  # cut off before its end
)
_KEY = re.compile(
    r"(?<![A-Za-z0-9_])(?:"
    r"(?:AKIA|ASIA)[0-9A-Z]{16}"  # AWS
    r"|LTAI[0-9A-Za-z]{12,26}|AKID[0-9A-Za-z]{13,40}"  # Alibaba, Tencent
    r"|AIza[0-9A-Za-z_-]{35}"  # Google
    r"|gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{22,255}|glpat-[A-Za-z0-9_-]{20,255}"
    r"|(?:sk|pk|rk)[-_][A-Za-z0-9_-]{20,255}"  # OpenAI and others, Stripe
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,255}"  # Slack
    r"|hf_[A-Za-z0-9]{30,255}|npm_[A-Za-z0-9]{36}"
    r"|eyJ[A-Za-z0-9_-]{10,8192}\.eyJ[A-Za-z0-9_-]{10,8192}\.[A-Za-z0-9_-]{10,8192}"  # JSON web token
    r")(?![A-Za-z0-9])"
)
_DIGITLESS_KEY = re.compile("AKIA|ASIA|LTAI|AKID")
"""Beginnings of keys so short that one in thirty has no digit, without which the scans take them for a name."""
_DIGITLESS_KEY_CHARS = 64
_ASSIGNED_KEY = re.compile(
    r"((?:api|access|secret|private|auth)[_-]?(?:key|token)|secret|token|passwd|password)"
    r"([\"']?\s{0,4}[:=]\s{0,4}[\"']?)([A-Za-z0-9+/_-]{16,255}={0,2})(?![A-Za-z0-9+/_(.-])",
    re.IGNORECASE,
)


class Hints(NamedTuple):
    """What the scan saw in one text."""

    emails: int
    longest_number: int
    long_tokens: int


def mask_text(text: str, options: Mask, hints: Hints | None = None) -> tuple[str, dict[str, int]]:
    """`text` with the marks, and how many of each kind were set. Without `hints` everything is looked for."""
    counts: dict[str, int] = {}
    for kind, enabled, likely, replace in (
        ("keys", options.keys, hints is None or hints.long_tokens or _DIGITLESS_KEY.search(text), _mask_keys),
        ("id_numbers", options.id_numbers, hints is None or hints.longest_number >= ID_DIGITS, _mask_id_numbers),
        ("bank_cards", options.bank_cards, hints is None or hints.longest_number >= CARD_DIGITS, _mask_cards),
        ("ip_addresses", options.ip_addresses, hints is None or hints.longest_number >= IP_DIGITS, _mask_ip_addresses),
        ("emails", options.emails, hints is None or hints.emails > 0, _mask_emails),
        ("phones", options.phones, hints is None or hints.longest_number >= PHONE_DIGITS, _mask_phones),
        ("addresses", options.addresses, "号" in text, _mask_addresses),
    ):
        if enabled and likely:
            text, number = replace(text)
            if number:
                counts[kind] = number
    return text, counts


def is_id_number(number: str) -> bool:
    """Whether the check digit of an 18-character Chinese identity number is right."""
    total = sum(int(digit) * weight for digit, weight in zip(number[:17], _ID_WEIGHTS, strict=True))
    return "10X98765432"[total % 11] == number[17].upper()


def _mask_keys(text: str) -> tuple[str, int]:
    blocks = 0
    if "PRIVATE KEY" in text:
        text, blocks = _PRIVATE_KEY.subn(MARKS["keys"], text)
    places = [(start - 48, _token_end(text, start, end)) for start, end in _tokens(text)]
    digitless = [(key.start() - 1, key.start() + _DIGITLESS_KEY_CHARS) for key in _DIGITLESS_KEY.finditer(text)]
    text, known = _replace(_KEY, text, sorted(places + digitless), lambda _: MARKS["keys"])
    if known:
        places = [(start - 48, end + 8) for start, end in _tokens(text)]
    text, assigned = _replace(
        _ASSIGNED_KEY, text, places, lambda m: f"{m[1]}{m[2]}{MARKS['keys']}" if _is_random(m[3]) else None
    )
    return text, blocks + known + assigned


def _token_end(text: str, start: int, end: int) -> int:
    """A little behind the run; behind the whole of a JSON web token, whose three parts have dots between them."""
    if text.startswith("eyJ", start):
        while end < len(text) and (text[end].isalnum() or text[end] in "._-"):
            end += 1
    return end + 8


def _mask_id_numbers(text: str) -> tuple[str, int]:
    places = ((start - 2, end + 2) for start, end in _digits(text, ID_DIGITS))
    return _replace(_ID_NUMBER, text, places, lambda match: MARKS["id_numbers"] if is_id_number(match[0]) else None)


def _mask_cards(text: str) -> tuple[str, int]:
    places = ((start - 2, end + 2) for start, end in _digits(text, CARD_DIGITS))
    return _replace(_CARD, text, places, lambda match: MARKS["bank_cards"] if _has_check_digit(match[0]) else None)


def _has_check_digit(number: str) -> bool:
    """The formula of Luhn."""
    digits = [int(digit) for digit in reversed(number) if digit.isdigit()]
    return sum(digits[::2]) % 10 == -sum(sum(divmod(2 * digit, 10)) for digit in digits[1::2]) % 10


def _mask_ip_addresses(text: str) -> tuple[str, int]:
    places = [(start - 2, end + 2) for start, end in _digits(text, IP_DIGITS)] if "." in text else []
    text, fours = _replace(_IPV4, text, places, _ip_mark)
    whole = [(0, len(text))] if "::" in text or text.count(":") >= 7 else []
    text, sixes = _replace(_IPV6, text, whole, _ip_mark)
    return text, fours + sixes


def _ip_mark(match: re.Match[str]) -> str | None:
    try:
        is_public = ip_address(match[0]).is_global
    except ValueError:
        return None
    is_version = ":" not in match[0] and (
        sum(int(number) >= LARGE_NUMBER for number in match[0].split(".")) < 2
        or _VERSION.search(match.string, max(0, match.start() - 12), match.start())
    )
    return MARKS["ip_addresses"] if is_public and not is_version else None


def _mask_addresses(text: str) -> tuple[str, int]:
    places = ((at.start() - 50, at.start() + 40) for at in re.finditer("号", text))
    return _replace(_ADDRESS, text, places, _address_mark)


def _address_mark(match: re.Match[str]) -> str | None:
    if not match["place"] and not match["flat"]:
        return None
    before = _BEFORE_ADDRESS.match(match[0])
    province = _PROVINCE.search(match[0], 0, 12)
    kept = max(before.end() if before else 0, province.start() if province else 0)
    return f"{match[0][:kept]}{MARKS['addresses']}"


def _mask_emails(text: str) -> tuple[str, int]:
    places = ((at.start() - 66, at.start() + 600) for at in re.finditer("@", text))
    return _replace(_EMAIL, text, places, lambda _: MARKS["emails"])


def _mask_phones(text: str) -> tuple[str, int]:
    places = ((start - 4, end + 4) for start, end in _digits(text, PHONE_DIGITS))
    digits = range(PHONE_DIGITS, 16)
    return _replace(
        _PHONE, text, places, lambda match: MARKS["phones"] if sum(map(str.isdigit, match[0])) in digits else None
    )


def _digits(text: str, at_least: int) -> list[tuple[int, int]]:
    """Where so many digits stand with at most two other characters between them."""
    pattern = rf"[0-9](?:[^0-9]{{0,2}}[0-9]){{{at_least - 1},}}"
    return [found.span() for found in re.finditer(pattern, text, re.DOTALL)]


def _tokens(text: str) -> list[tuple[int, int]]:
    """Where long runs of letters and digits stand."""
    return [run.span() for run in _TOKEN.finditer(text) if re.search("[0-9]", run[0]) and re.search("[A-Za-z]", run[0])]


def _replace(
    pattern: re.Pattern[str],
    text: str,
    places: Iterable[tuple[int, int]],
    mark_of: Callable[[re.Match[str]], str | None],
) -> tuple[str, int]:
    """Like subn within `places`, which are in order; a match whose mark is None stays and is not counted."""
    pieces: list[str] = []
    done_to = 0
    for start, end in _merged(places):
        for match in pattern.finditer(text, start, end):
            mark = mark_of(match)
            if mark is not None:
                pieces += (text[done_to : match.start()], mark)
                done_to = match.end()
    if not pieces:
        return text, 0
    return "".join((*pieces, text[done_to:])), len(pieces) // 2


def _merged(places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The places, with those that overlap made one."""
    begin, stop = -1, -1
    for place, end in places:
        start = max(place, 0)
        if start > stop:
            if begin >= 0:
                yield begin, stop
            begin = start
        stop = max(stop, end)
    if begin >= 0:
        yield begin, stop


def _is_random(token: str) -> bool:
    """Digits and letters mixed, as in keys and not as in names."""
    digits = sum(character.isdigit() for character in token)
    return 3 <= digits < len(token)
