"""Formulas as a browser takes them: mathml("R(Z) = ½ logdet(I + α Z Z^*)")."""
import re

# a group, a root, a word, a number, or one sign; then what stands below and above it
ATOM = r"(\{[^{}]*\}|√\w|[A-Za-z]{2,}|[\d.]+|\S)"
SIGN = re.compile(rf"{ATOM}(?:_{ATOM})?(?:\^{ATOM})?")


def mathml(words):
    """MathML of a formula: each letter, number or word is a sign; _ and then ^ begin what stands
    below and above; braces hold a group, which has none inside."""
    def atom(word):
        if word[0] == "{":
            return mathml(word[1:-1])
        if word[0] == "√":
            return f"<msqrt>{atom(word[1:])}</msqrt>"
        if word[0].isalnum() or word == "½":
            kind = "mn" if not word.isalpha() else "mi" if len(word) == 1 else "mtext"
            return f"<{kind}>{word}</{kind}>"
        tight = ' lspace="0" rspace="0"' if word == "‖" else ""
        return f'<mo stretchy="false"{tight}>{word.replace("*", "∗")}</mo>'

    def sign(found):
        base, *scripts = found.groups()
        places = ("under", "over") if base in ("∑", "max", "min", "{arg min}") else ("sub", "sup")
        name = "".join(place for place, script in zip(places, scripts) if script)
        inside = "".join(atom(script).replace("<mo ", '<mo lspace="0" rspace="0" ')
                         for script in scripts if script)
        return f"<m{name}>{atom(base)}{inside}</m{name}>" if name else atom(base)

    return "<mrow>" + "".join(map(sign, SIGN.finditer(words))) + "</mrow>"
