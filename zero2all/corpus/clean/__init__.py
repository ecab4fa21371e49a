"""Cleaning by character and script: repair, edits, rules that drop a document, masks."""
