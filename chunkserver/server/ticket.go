package server

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// Tickets let a peer that is authenticated over TLS open plain connections; see wire/mac.go.
// The server keeps no state of tickets. A ticket is encrypted (AES-256-GCM, the nonce in
// front) with a key of this process, so it ends with the process, too:
//
//	 0  8  end of its validity, ns since 1970
//	 8 32  secret
//	40  n  identity: cluster/role/name/admission

// ticketLife is how long a ticket opens connections. Requests on them need capabilities all
// the same.
const ticketLife = 10 * time.Minute

const secretSize = 32

func newTicketSeal() cipher.AEAD {
	key := make([]byte, 32)
	rand.Read(key)
	block, err := aes.NewCipher(key)
	if err != nil {
		panic("server: a key of 32 bytes is one of AES: " + err.Error())
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic("server: AES has a block of 16 bytes: " + err.Error())
	}
	return aead
}

// ticket makes a ticket for a peer with a certificate.
func (s *Server) ticket(who peer.Identity, now time.Time) (wire.Answer, error) {
	if who.Role == "" {
		return wire.Answer{}, meta.E("give ticket", meta.AccessDenied, who.String(), errors.New("tickets are for peers with a known certificate"))
	}
	end := now.Add(ticketLife)
	if end.After(who.Expires) {
		end = who.Expires
	}
	b := binary.BigEndian.AppendUint64(nil, uint64(end.UnixNano()))
	secret := make([]byte, secretSize)
	rand.Read(secret)
	b = append(b, secret...)
	b = append(b, fmt.Sprintf("%s/%s/%s/%d", who.Cluster, who.Role, who.Name, who.Admission)...)
	nonce := make([]byte, s.tickets.NonceSize())
	rand.Read(nonce)
	return wire.Answer{Ticket: s.tickets.Seal(nonce, nonce, b, nil), Secret: secret, TTL: uint32(max(end.Sub(now), 0) / time.Second)}, nil
}

// admit decrypts a ticket and returns its secret and its identity.
func (s *Server) admit(ticket []byte, now time.Time) (secret []byte, who peer.Identity, err error) {
	bad := meta.E("take ticket", meta.BadCapability, "", errors.New("it is not of this server, or its time is over"))
	n := s.tickets.NonceSize()
	if len(ticket) < n {
		return nil, who, bad
	}
	b, err := s.tickets.Open(nil, ticket[:n], ticket[n:], nil)
	if err != nil || len(b) < 8+secretSize {
		return nil, who, bad
	}
	end := time.Unix(0, int64(binary.BigEndian.Uint64(b)))
	p := strings.SplitN(string(b[8+secretSize:]), "/", 4)
	if len(p) != 4 || !now.Before(end) {
		return nil, who, bad
	}
	again, err := strconv.ParseUint(p[3], 10, 32)
	if err != nil {
		return nil, who, bad
	}
	return b[8 : 8+secretSize], peer.Identity{Cluster: p[0], Role: peer.Role(p[1]), Name: p[2], Admission: uint32(again), Expires: end}, nil
}
