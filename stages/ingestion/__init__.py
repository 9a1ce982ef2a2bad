"""What `ingest` is made of, in reading order:

sources.py     files, directories and hub sets -> raw records, damage included
formats.py     which format a file has, and the reading of its rows
adapters.py    one adapter per format: raw record -> row of one of our kinds (TRL, HH, AlpacaEval, GSM8K, ratings ...)
fields.py      one value of a record as the schemas want it
choices.py     multiple-choice rows of MMLU, ARC, HellaSwag, tables ... -> prompts with choices
rules.py       the quarantine codes of `data.validate`
plain.py       rows of a file as they are, uncurated
whole.py       files that are read as a whole or not at all (rubrics, principles)
pairing.py     rankings, ratings, Likert labels, votes and thumbs -> pairs (and back)
conversions.py the conversion matrix A.1 as row-wise and grouped converters
near_duplicates.py  near duplicates on disk (MinHash)
curation.py    splits, near duplicates, decontamination, bias audit, statistics of agreement
agreement.py   who labelled what how, and agreement per batch and slice
seen.py        duplicate detection and grouping on disk
"""
