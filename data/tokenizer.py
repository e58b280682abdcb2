"""Characters or GPT-2's byte pairs as token ids."""
import numpy as np

from flags import UserError


class CharTokenizer:
    """One id for each of `characters`, in that order, and one more (the last) for any other."""
    eot = None

    def __init__(self, characters):
        if len(characters) >= 2 ** 16:      # ids are uint16
            raise UserError(f"{len(characters)} different characters: --tokenizer=gpt2 takes any")
        self.characters = characters
        self.n_text = len(characters)           # the ids below it mean text
        self.n_vocab = len(characters) + 1
        self.table = np.full(0x110000, len(characters), dtype=np.uint16)
        self.table[[ord(character) for character in characters]] = np.arange(len(characters))
        self.start = int(self.encode("\n")[0])      # the token before a new document

    def encode(self, text):
        """str -> uint16 (number of characters,)."""
        return self.table[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)]

    def decode(self, ids):
        """ids -> str, the last id as U+FFFD; without the ids that only pad a model's vocabulary."""
        signs = self.characters + "\ufffd"
        return "".join(signs[i] for i in map(int, ids) if i < self.n_vocab)

    def meta(self):
        return {"kind": "char", "characters": self.characters}


class GPT2Tokenizer:
    """GPT-2's byte pairs, 50257 ids. Raises UserError if tiktoken cannot get their files."""

    def __init__(self):
        import tiktoken
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError):       # no network; a damaged file
            raise UserError("GPT-2's BPE files are neither in tiktoken's cache nor within reach: "
                            "connect once, or set TIKTOKEN_CACHE_DIR to a folder of them") from None
        self.n_vocab = self.n_text = self.encoding.n_vocab
        self.eot = self.start = self.encoding.eot_token

    def encode(self, text):
        """str -> uint16 (n,); text that looks like a special token is encoded as text."""
        return np.array(self.encoding.encode_ordinary(text), dtype=np.uint16)

    def decode(self, ids):
        """ids -> str, bytes that are not UTF-8 as U+FFFD; without the ids that only pad."""
        piece = self.encoding.decode_single_token_bytes
        data = b"".join(piece(i) for i in map(int, ids) if i < self.n_vocab)
        return data.decode("utf-8", errors="replace")

    def meta(self):
        return {"kind": "gpt2"}


def tokenizer_from_meta(meta):
    """The tokenizer that a meta.json, or a checkpoint's copy of it, describes."""
    if meta["tokenizer"]["kind"] == "char":
        return CharTokenizer(meta["tokenizer"]["characters"])
    return GPT2Tokenizer()
