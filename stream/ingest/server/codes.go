package server

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"penstock.io/penstock/meta"
)

// statusOf translates a kind of error to the status of an HTTP response.
func statusOf(k meta.Kind) int {
	switch k {
	case meta.NotFound, meta.NotDir, meta.NoSuchVolume:
		return http.StatusNotFound
	case meta.Invalid, meta.NameTooLong, meta.Protocol:
		return http.StatusBadRequest
	case meta.NotSupported:
		return http.StatusUnsupportedMediaType
	case meta.AccessDenied, meta.NotPermitted, meta.ReadOnly:
		return http.StatusForbidden
	case meta.WrongOffset:
		return http.StatusConflict
	case meta.TooBig, meta.FileTooBig:
		return http.StatusRequestEntityTooLarge
	case meta.WouldBlock, meta.ResourceExceeded:
		return http.StatusTooManyRequests
	case meta.NoSpace, meta.QuotaExceeded:
		return http.StatusInsufficientStorage
	case meta.Fenced, meta.Unavailable, meta.SessionExpired, meta.Stale, meta.Canceled, meta.Interrupted, meta.NotOwner, meta.Busy, meta.Again:
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// retryAfter is the number of seconds after which a client repeats a request that the gateway
// can't serve now.
const retryAfter = "1"

// refuse answers a request of which no record was appended.
func refuse(w http.ResponseWriter, err error) { reply(w, &answer{}, err) }

// unauthenticated answers a request of a client that did not log in. A gRPC client takes the status
// for UNAUTHENTICATED.
func unauthenticated(w http.ResponseWriter, err error) {
	if k := meta.KindOf(err); k != meta.AccessDenied || errors.Is(err, context.Canceled) {
		refuse(w, meta.E("log in", meta.Unavailable, "gateway", errors.New("the gateway can't read its users now")))
		return
	}
	w.Header().Set("WWW-Authenticate", `Basic realm="penstock", charset="UTF-8"`)
	send(w, http.StatusUnauthorized, &answer{Error: "log in with the name and password of a user, or with a client certificate"})
}

// reply answers a request. err says why the request ended early; nil if it did not.
func reply(w http.ResponseWriter, a *answer, err error) {
	status := http.StatusOK
	if a.RefusedCount > 0 {
		status = http.StatusUnprocessableEntity
	}
	if err != nil {
		a.Error = err.Error()
		status = statusOf(meta.KindOf(err))
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			status = http.StatusRequestEntityTooLarge
		}
	}
	switch status {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable, http.StatusInsufficientStorage:
		w.Header().Set("Retry-After", retryAfter)
	}
	send(w, status, a)
}

// redirect sends a client to the gateway that leads the partition of a request, of which no record was
// appended (307, RFC 9110: the client repeats the request there with its body).
func redirect(w http.ResponseWriter, r *http.Request, partition int32, other *elsewhere) {
	to := *r.URL
	to.Scheme, to.Host = "http", other.gateway
	if r.TLS != nil {
		to.Scheme = "https"
	}
	q := to.Query()
	q.Set("partition", strconv.Itoa(int(partition)))
	to.RawQuery = q.Encode()
	w.Header().Set("Location", to.String())
	send(w, http.StatusTemporaryRedirect, &answer{Partition: partition, Appended: []run{}, Error: other.Error()})
}

// send sends an answer.
func send(w http.ResponseWriter, status int, a *answer) {
	text, err := json.Marshal(a)
	if err != nil {
		panic("ingest: an answer of plain values can't be encoded: " + err.Error())
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// The client may be gone: nobody else needs the error.
	_, _ = w.Write(append(text, '\n'))
}
