package placement

import (
	"fmt"
	"strconv"
	"strings"
)

// Address is the text that a leader tells of itself: the gateway's number and the address of its
// Kafka server, "number@host:port".
func (g Gateway) Address() string { return fmt.Sprintf("%d@%s", g.Number, g.Kafka) }

// ParseAddress parses an Address; false: the text is no Address, or without a Kafka server.
func ParseAddress(text string) (g Gateway, ok bool) {
	number, at, ok := strings.Cut(text, "@")
	if !ok {
		return g, false
	}
	n, err := strconv.ParseInt(number, 10, 32)
	if err != nil || n < 0 {
		return g, false
	}
	g = Gateway{Number: int32(n), Kafka: at}
	_, _, ok = g.KafkaAt()
	return g, ok
}

// KafkaAt returns host and port of the gateway's Kafka server; false: it has none.
func (g Gateway) KafkaAt() (host string, port int32, ok bool) {
	i := strings.LastIndexByte(g.Kafka, ':')
	if i < 1 {
		return "", 0, false
	}
	host = g.Kafka[:i]
	if v6, ok := strings.CutPrefix(host, "["); ok {
		if host, ok = strings.CutSuffix(v6, "]"); !ok {
			return "", 0, false
		}
	}
	n, err := strconv.ParseUint(g.Kafka[i+1:], 10, 16)
	return host, int32(n), err == nil && n > 0 && host != ""
}
