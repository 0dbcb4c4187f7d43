"""Portamoe inside other projects; each part is imported only by the project that it is for."""
