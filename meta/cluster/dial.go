package cluster

import (
	"crypto/tls"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"penstock.io/penstock/meta"
)

// Dial makes a client of an etcd cluster: endpoints are "https://host:port",
// "http://host:port" or "unix:///path"; tlsConfig is nil without TLS. It does
// not wait for a connection. The client's own log is silent: its errors reach
// the callers. Errors: Invalid.
func Dial(endpoints []string, tlsConfig *tls.Config) (*clientv3.Client, error) {
	cli, err := clientv3.New(clientv3.Config{
		Endpoints: endpoints,
		TLS:       tlsConfig,
		// A connection that is dead without a word is noticed in eight seconds;
		// etcd by default throws out who asks more often than every five.
		DialKeepAliveTime:    6 * time.Second,
		DialKeepAliveTimeout: 2 * time.Second,
		Logger:               zap.NewNop(),
	})
	if err != nil {
		return nil, meta.E("reach etcd", meta.Invalid, "", err)
	}
	return cli, nil
}
