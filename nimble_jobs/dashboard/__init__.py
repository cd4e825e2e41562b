"""The dashboard: a web server over one state folder, for its owner. It never submits a job and never runs code.

`serve` starts it, `app` puts it together. A request first passes the `gate`, which refuses what may be an attack.
Then one of the `routes` answers it with JSON made by `nimble_jobs.views`, so that page and command line say the same.
`stream` follows the store and tells all open pages what changes. `page` holds the static files.
"""
