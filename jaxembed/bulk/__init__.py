"""Embeds, scores and classifies the rows of files. The results are one file of vectors, or a folder
of Parquet files; a job that was stopped resumes from its folder."""
