"""Small tokenizers of the kinds that decoders have, trained on a few sentences."""

import json

from mithril_gguf.vocabulary import PATTERNS

TEXTS = [
    "The quick brown fox jumps over the lazy dog, 12345 times; isn't it?",
    "Where there's a will, there's a way.\n\n  Indented lines   and 42 spaces.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 日本語 ✓",
]


def train(kind, size=330):
    """Return a tokenizer: ``gpt-2`` or one of PATTERNS, ``spaces`` with bytes as fallback, or ``wordpiece``."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    if kind == "wordpiece":
        t = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        t.normalizer, t.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        t.decoder = decoders.WordPiece()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = trainers.WordPieceTrainer(vocab_size=size - 150, special_tokens=special, show_progress=False)
        t.train_from_iterator(TEXTS[:2] * 3, trainer)
        ends = [(name, t.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
        t.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=ends)
        return t
    if kind == "spaces":
        t = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        t.decoder = decoders.Sequence(parts)
        bytes_ = [f"<0x{n:02X}>" for n in range(256)]
        special = ["<unk>", "<s>", "</s>", *bytes_]
        trainer = trainers.BpeTrainer(vocab_size=size + 60, special_tokens=special, show_progress=False)
        t.train_from_iterator(TEXTS[:2] * 3, trainer)
        content = json.loads(t.to_str())
        content["added_tokens"] = content["added_tokens"][:3]
        t = tokenizers.Tokenizer.from_str(json.dumps(content))
    else:
        t = tokenizers.Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt-2")
        t.pre_tokenizer = level
        if kind != "gpt-2":
            split = pre_tokenizers.Split(tokenizers.Regex(PATTERNS[kind]), "isolated")
            t.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        t.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<s>", "</s>"]
        options = {"initial_alphabet": alphabet, "show_progress": False}
        t.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=size, special_tokens=special, **options))
    begin = t.token_to_id("<s>")
    t.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", begin)])
    return t


SAMPLES = [*TEXTS, "fox dog", " the  fox's 7 2024", "émile\n\tdog</s>the"]
