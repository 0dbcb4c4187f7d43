"""The adapters of FlashInfer, which is `import flashinfer` here too: imports are absolute."""
