"""What the product is made of, and what is known against it: software bills of materials, and the audit.

`make sbom` writes CycloneDX JSON out of the hash-locked requirements, without a network. `make audit` asks for known
vulnerabilities: PyPI's or OSV's service, or a file of OSV's that was fetched before.
"""
