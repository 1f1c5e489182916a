package verbstest

var connectionTests []conformanceTest
