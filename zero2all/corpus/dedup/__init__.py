"""Duplicates: exact, near, and lines that stand in many documents."""
