"""A server of HTTP/1.1 and HTTP/2 on the parsers of `h11` and `h2`: hostile peers are the normal case.

For CloudBoard's ingress and the device's proxy.

listening    the socket
server       accepts, counts and lets go of connections
rooms        where a connection waits when no request of its is served, and for how long
connection   one TCP connection: finds out which HTTP it speaks
http1        its HTTP/1.1 side
http2        its HTTP/2 side
frame_guard  floods of HTTP/2 frames, noticed before they are parsed
exchange     one request and its response, as the application sees them
reply        what the server says that is no answer of the application
limits       every number
"""
