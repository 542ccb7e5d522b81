package kafka

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"penstock.io/penstock/stream"
)

// plain is the mechanism in which the client sends the password (RFC 4616).
const plain = "PLAIN"

// mechanisms are the SASL mechanisms that the server offers.
func mechanisms() []string {
	all := []string{plain}
	for _, m := range stream.Mechanisms {
		all = append(all, string(m))
	}
	return all
}

// maxLogin bounds the frames of a client that has not logged in, in bytes.
const maxLogin = 16 << 10

// login is the authentication of a connection. The goroutine that reads requests uses it alone.
// Before the client has logged in, the connection takes ApiVersions, SaslHandshake, and then
// SaslAuthenticate; every other request ends the connection, as in Kafka.
type login struct {
	users *stream.Users // nil: nobody must log in
	as    *stream.Login // who has logged in; nil: nobody yet
	// step takes the client's next token, and returns the answer, and whether the client has
	// logged in; nil: no SaslHandshake came.
	step func(ctx context.Context, token []byte) (answer []byte, done bool, err error)
}

// wanted reports that the client must log in.
func (l *login) wanted() bool { return l.users != nil && l.as == nil }

// admit refuses a request of a client that must log in first.
func (l *login) admit(key int16) error {
	if !l.wanted() || key == apiVersionsKey || key == saslHandshakeKey || key == saslAuthenticateKey {
		return nil
	}
	return fmt.Errorf("%w: request %d came before the client has logged in", errFrame, key)
}

// choose begins a login with a mechanism, and reports whether the mechanism is known.
func (l *login) choose(mechanism string) bool {
	if mechanism == plain {
		l.step = l.plain
		return true
	}
	m := stream.Mechanism(mechanism)
	if m.Hash() == nil {
		return false
	}
	c, err := newScramLogin(l.users, m)
	if err != nil {
		return false
	}
	l.step = func(_ context.Context, token []byte) ([]byte, bool, error) {
		if c.serverFirst == "" {
			answer, err := c.first(string(token))
			return []byte(answer), false, err
		}
		answer, err := c.last(string(token))
		if err != nil {
			return nil, false, err
		}
		l.as = c.as
		return []byte(answer), true, nil
	}
	return true
}

// plain takes the only token of PLAIN: the user to act as, the name and the password, with
// zero bytes between.
func (l *login) plain(ctx context.Context, token []byte) ([]byte, bool, error) {
	parts := bytes.Split(token, []byte{0})
	if len(parts) != 3 || len(parts[1]) == 0 || len(parts[0]) > 0 && !bytes.Equal(parts[0], parts[1]) {
		return nil, false, errors.New("the token of PLAIN has a name and a password, and no other user to act as")
	}
	name := string(parts[1])
	as, err := l.users.Check(ctx, name, string(parts[2]))
	if err != nil {
		return nil, false, err
	}
	l.as = as
	return nil, true, nil
}
