"""The adapter of AMD's AITER, which is `import aiter` here too: imports are absolute."""
