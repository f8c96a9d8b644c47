"""Answers judged in processes of their own, each with a deadline that is enforced."""
