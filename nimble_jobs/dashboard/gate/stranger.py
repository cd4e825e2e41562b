"""What a browser without the cookie sees at `/`. It has neither script nor style, because both would need the cookie.

Browsers leave out a cookie with SameSite=Strict if a link on another site leads here. The form on this page brings it.
It is a form without an action, because that keeps the part of the address after #, which names the view.
"""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>nimble-jobs: not signed in</title>
</head>
<body>
<main>
<h1>Not signed in</h1>
<form>
<p>Did a link on another page lead you here? Your browser does not sign you in through links of other sites.</p>
<p><button>Open the dashboard</button></p>
</form>
<p>If you see this page again, open the address that <code>nimble-jobs dashboard</code> printed. It ends in
<code>?token=</code> and the token, which signs you in.</p>
<p>You can start the dashboard again to have the address printed. The token stays the same.</p>
</main>
</body>
</html>
"""
