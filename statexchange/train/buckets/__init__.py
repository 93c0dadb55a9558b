"""Averaging gradients in flat buckets while backward goes on; `reducer` explains how."""
