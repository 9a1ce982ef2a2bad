"""What `ingest` is made of, in reading order:

pipeline.py    the ingest run: one pass over the input, and a second one over groups of rows
input_data.py  its input: a dataset of ours, or files, each read through the adapter of its format
sources.py     files, directories and hub sets -> raw records, damage included
formats.py     which format a file has, and the reading of its rows
adapters.py    one adapter per format: raw record -> row of one of our kinds (TRL, HH, AlpacaEval, GSM8K, ratings ...)
published/     published datasets in columns of their own -> columns that formats.py reads
choices.py     multiple-choice rows of MMLU, ARC, HellaSwag, tables ... -> prompts with choices
programs.py    benchmarks of programs -> prompts with tests
best_of.py     several good and several bad answers to each prompt: RewardBench 2, RM-Bench
fields.py      one value of a record as the schemas want it
rules.py       the quarantine codes of `data.validate`
plain.py       rows of a file as they are, uncurated
answers.py     answers that somebody else made, for evaluations
conversions.py the conversion matrix A.1 as row-wise and grouped converters
pairing.py     rankings, ratings, Likert labels, votes and thumbs -> pairs (and back)
grouping.py    the second pass: what becomes of the rows of one prompt once they have met
votes.py       several labels of the same answers as votes
agreement.py   who labelled what how, and agreement per batch and slice
duplicates.py  what makes two rows the same
seen.py        duplicate detection and grouping on disk
near_duplicates.py  near duplicates on disk (MinHash)
benchmarks.py  the evaluation sets that are kept out of training data
splits.py      which split a row goes to
curation.py    splits, near duplicates, decontamination, bias audit, statistics of agreement
counts.py      what a run counts, and the rows that it refuses
account.py     its end: the account, warnings, the report, when it fails
"""
