"""Draft tokens, verify them in one step: does it pay?"""
