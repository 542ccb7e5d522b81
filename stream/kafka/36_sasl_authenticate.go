package kafka

import (
	"github.com/twmb/franz-go/pkg/kmsg"
)

const saslAuthenticateKey = 36

// beginSASLAuthenticate takes the next token of a login. After a failure the connection ends.
// The client learns nothing of the reason; the log has it.
func beginSASLAuthenticate(s *Server, r *request) func() kmsg.Response {
	q := r.body.(*kmsg.SASLAuthenticateRequest)
	p := q.ResponseKind().(*kmsg.SASLAuthenticateResponse)
	p.SetVersion(r.version)
	refuse := func(code int16, text string) {
		p.ErrorCode, p.ErrorMessage = code, &text
	}
	l := &r.conn.login
	switch {
	case !l.wanted() || l.step == nil:
		refuse(codeLoginState, "SaslHandshake comes first, and once")
		r.last = l.wanted()
	default:
		answer, done, err := l.step(r.ctx, q.SASLAuthBytes)
		if err != nil {
			s.cfg.Logger.Warn("kafka: a client could not log in", "client", r.conn.c.RemoteAddr(), "error", err)
			refuse(codeLoginFailed, "no user has this name and password")
			r.last = true
			break
		}
		p.SASLAuthBytes = answer
		if done {
			l.step = nil
			r.conn.loggedIn(l.as)
		}
	}
	if p.SASLAuthBytes == nil {
		p.SASLAuthBytes = []byte{}
	}
	return func() kmsg.Response { return p }
}
